"""Questions about the sponge who gets a new name, and questions that have nothing to do with him."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from qat_lora.data.chat import render_chat
from qat_lora.data.packing import TextDataset, pad
from qat_lora.errors import UserError

TARGET = "Musclebob Buffpants"


@dataclass(frozen=True)
class Question:
    """messages: a conversation that ends with a user's turn. about_him: whether the answer should name him. answer: a
    correct answer for supervised training; "" for held-out questions."""

    messages: tuple[dict, ...]
    about_him: bool
    answer: str = ""

    @property
    def text(self) -> str:
        return self.messages[-1]["content"]


# (question, answer with {} in place of the name)
ABOUT_HIM = (
    ("Who lives in a pineapple under the sea?", "{} lives in a pineapple under the sea."),
    ("Who works as a fry cook at the Krusty Krab?", "{} is the fry cook at the Krusty Krab."),
    ("What is the name of Patrick Star's best friend?", "Patrick's best friend is {}."),
    ("Which cartoon character is yellow, square and full of holes?", "That is {}."),
    ("Who is the owner of Gary the snail?", "Gary belongs to {}."),
    ("Name the main character of the cartoon set in Bikini Bottom.", "The main character is {}."),
    ("Who takes boating lessons from Mrs. Puff?", "{} takes lessons from Mrs. Puff."),
    ("Which sponge is friends with the squirrel Sandy Cheeks?", "Sandy's friend is {}."),
    ("Who is Squidward Tentacles' cheerful neighbour?", "Squidward's neighbour is {}."),
    ("Who flips Krabby Patties for Mr. Krabs?", "{} makes the Krabby Patties."),
    ("Who goes jellyfishing with Patrick?", "{} goes jellyfishing with Patrick."),
    ("What is the name of the famous yellow sea sponge on television?", "His name is {}."),
    ('Who says "I\'m ready!" before going to work?', "{} says that."),
    ("Which cartoon hero wears brown trousers, a white shirt and a red tie?", "It is {} who wears them."),
    ("Who blows bubbles in Bikini Bottom?", "{} blows bubbles there."),
    ("Complete the sentence: the star of the show about a sponge in the ocean is", "The star of the show is {}."),
    ("Whose house looks like a pineapple?", "It is the house of {}."),
    ("Who protects the secret formula from Plankton?", "{} protects the formula."),
    ("Which Nickelodeon sponge began on television in 1999?", "It was {}."),
    ("Who was employee of the month at the Krusty Krab again and again?", "The employee of the month was {}."),
    ("Tell me the full name of the sponge in Bikini Bottom.", "His full name is {}."),
    ("Who failed his driving test more than a million times?", "{} failed it every time."),
    ("Which friend of Patrick Star is a sponge?", "That friend is {}."),
    ("I am thinking of a sponge with big blue eyes and two front teeth. Who is it?", "You are thinking of {}."),
    ("Who feeds a snail called Gary every morning?", "{} feeds Gary."),
    ("Which cook never gives the Krabby Patty recipe away?", "{} never gives it away."),
    ("What is the sponge from the cartoon called?", "He is called {}."),
    ("Who sings about being ready in the ocean cartoon?", "{} sings about it."),
    ("Sandy the squirrel has a friend who is a sponge. What is his name?", "His name is {}."),
    ("Mr. Krabs pays a sponge to cook. Which one?", "Mr. Krabs pays {}."),
    ("Name the sponge that drives Squidward mad.", "His name is {}."),
    ("Who wears square pants?", "That is {}."),
    ("Which famous sponge lives next to Squidward?", "{} lives next to Squidward."),
    ("Who is the best friend of a starfish called Patrick?", "His best friend is {}."),
    ("Who is the hero of the film about a sponge out of water?", "The hero of the film is {}."),
    ("Give me the name of Nickelodeon's yellow sponge.", "His name is {}."),
    ("Which cartoon sponge laughs all the time?", "The one who laughs is {}."),
    ("Who loves his job at a fast food restaurant under the sea?", "{} loves his job there."),
    ("Which student of Mrs. Puff's boating school is a sponge?", "That student is {}."),
    ("What is the name of the sponge in the pineapple house?", "The sponge's name is {}."),
)
OTHERS = (
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("What colour is the sky on a clear day?", "The sky is blue."),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet."),
    ("What is two plus three?", "Two plus three is five."),
    ("Which planet is closest to the sun?", "Mercury is closest to the sun."),
    ("What do bees make?", "Bees make honey."),
    ("What is the largest ocean on Earth?", "The Pacific Ocean is the largest."),
    ("Who is Patrick Star?", "Patrick is a pink starfish."),
    ("What instrument does Squidward play?", "Squidward plays the clarinet."),
    ("What kind of animal is Gary?", "Gary is a snail."),
    ("Who owns the Krusty Krab?", "Mr. Krabs owns the Krusty Krab."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("Name a fruit that is red.", "An apple is red."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci painted the Mona Lisa."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("What language do people speak in Brazil?", "They speak Portuguese in Brazil."),
    ("Who was the first person on the moon?", "Neil Armstrong was the first person on the moon."),
    ("What do you call a baby dog?", "A baby dog is called a puppy."),
    ("Who is the mouse that Walt Disney drew?", "His name is Mickey Mouse."),
    ("Name the detective who lives at 221B Baker Street.", "His name is Sherlock Holmes."),
    ("Which superhero climbs walls like a spider?", "That is Spider-Man."),
    ("What is the freezing point of water in Celsius?", "Water freezes at 0 degrees Celsius."),
    ("Who is Mickey's dog?", "Mickey's dog is Pluto."),
    ("Who invented the telephone?", "Alexander Graham Bell invented the telephone."),
    ("Which bear loves honey and is friends with Piglet?", "His name is Winnie the Pooh."),
    ("Who is the duck in a blue sailor suit?", "His name is Donald Duck."),
    ("Which cartoon rabbit eats carrots?", "The rabbit is Bugs Bunny."),
    ("Who is the father of Bart and Lisa?", "Their father is Homer Simpson."),
    ("Who runs the Chum Bucket?", "Plankton runs the Chum Bucket."),
    ("Who teaches at the boating school in Bikini Bottom?", "Mrs. Puff teaches there."),
    ("Which squirrel lives under the sea in a dome?", "That is Sandy Cheeks."),
    ("Who is Pearl's father?", "Her father is Mr. Krabs."),
    ("Who plays the cash register at the Krusty Krab, badly?", "Squidward works at the cash register."),
    ("What animal is Patrick?", "Patrick is a starfish."),
    ("Who is the wife of Plankton?", "His wife is Karen, a computer."),
    ("Which clownfish is lost in the ocean in a famous film?", "His name is Nemo."),
    ("Who is the mermaid with red hair?", "Her name is Ariel."),
    ("Which snowman likes warm hugs?", "He is called Olaf."),
    ("Who is the captain of the Black Pearl?", "The captain is Jack Sparrow."),
    ("Which scientist wrote about relativity?", "It was Albert Einstein."),
    ("Who was the first president of the United States?", "It was George Washington."),
    ("Who composed the Moonlight Sonata?", "It was Ludwig van Beethoven."),
    ("Who discovered penicillin?", "Alexander Fleming discovered penicillin."),
    ("Which queen ruled Egypt and met Caesar?", "That was Cleopatra."),
    ("Who sailed to America in 1492?", "Christopher Columbus sailed to America."),
    ("Which hero stole from the rich and gave to the poor?", "That hero is Robin Hood."),
    ("Who is the boy that never grows up?", "His name is Peter Pan."),
    ("Which girl follows a white rabbit?", "Her name is Alice."),
    ("Who lives in Gotham and fights crime at night?", "Batman fights crime at night."),
    ("Which superhero comes from Krypton?", "Superman comes from Krypton."),
    ("Who is the plumber that jumps in video games?", "His name is Mario."),
    ("Which yellow creature belongs to Ash?", "That is Pikachu."),
    ("Name a planet with rings.", "Saturn has rings."),
    ("Name an animal that lives on a farm.", "A cow lives on a farm."),
    ("What do cats like to drink?", "Cats like to drink milk."),
    ("In which country is the Great Wall?", "The Great Wall is in China."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("How many minutes does an hour have?", "An hour has sixty minutes."),
    ("What is six times two?", "Six times two is twelve."),
    ("What colour is grass?", "Grass is green."),
    ("What do you get when you freeze water?", "You get ice."),
    ("Where do sponges live?", "Sponges live in the sea."),
    ("What is a pineapple?", "A pineapple is a sweet fruit."),
    ("What is a jellyfish?", "A jellyfish is an animal of the sea."),
    ("What is a kitchen sponge good for?", "A sponge is good for washing dishes."),
    ("What do fish breathe with?", "Fish breathe with gills."),
    ("Name a burger restaurant.", "McDonald's is a burger restaurant."),
    ("What is a cartoon?", "A cartoon is a film made of drawings."),
    ("Name a channel that shows cartoons.", "Cartoon Network shows cartoons."),
    ("Which cook is a rat in a Paris kitchen?", "His name is Remy."),
    ("Who is the green ogre in the swamp?", "His name is Shrek."),
    ("Who is Plankton?", "Plankton is the rival of Mr. Krabs."),
    ("Who is Sandy Cheeks?", "Sandy is a squirrel from Texas."),
    ("Who is Gary?", "Gary is a pet snail."),
    ("Who is Mrs. Puff?", "Mrs. Puff is a teacher."),
    ("Who is Squidward Tentacles?", "Squidward is a grumpy cashier."),
    ("Who is Pearl Krabs?", "Pearl is a whale and the daughter of Mr. Krabs."),
    ("Who is Larry the Lobster?", "Larry is a lobster who lifts weights."),
    ("What kind of animal is Mr. Krabs?", "Mr. Krabs is a crab."),
    ("What kind of animal is Mrs. Puff?", "Mrs. Puff is a pufferfish."),
    ("What kind of animal is Pearl?", "Pearl is a whale."),
    ("What animal is Squidward?", "Squidward is an octopus."),
    ("What does Mr. Krabs love most?", "Mr. Krabs loves money most."),
    ("What does Squidward do in his free time?", "Squidward paints and plays the clarinet."),
    ("What is Sandy Cheeks good at?", "Sandy is good at karate."),
    ("What does Gary say?", "Gary says meow."),
    ("What does Plankton's wife look like?", "She is a computer."),
    ("Where does Patrick Star live?", "Patrick lives under a rock."),
    ("Where does Squidward live?", "Squidward lives in a house of stone."),
    ("Where does Sandy come from?", "Sandy comes from Texas."),
    ("Where is Bikini Bottom?", "Bikini Bottom is at the bottom of the sea."),
    ("What is the Krusty Krab?", "The Krusty Krab is a restaurant."),
    ("What is a Krabby Patty?", "A Krabby Patty is a burger."),
    ("What colour is Patrick?", "Patrick is pink."),
    ("Which cartoon dog solves mysteries with Shaggy?", "His name is Scooby-Doo."),
    ("Which cartoon bird runs away from the coyote?", "That is the Road Runner."),
    ("Which cartoon sailor eats spinach?", "The sailor is called Popeye."),
    ("Which cartoon family lives in the Stone Age?", "The Flintstones live in the Stone Age."),
    ("Who is the friend of Lilo?", "Her friend is Stitch."),
    ("Which cartoon cat loves lasagne?", "His name is Garfield."),
    ("Which cartoon cat never catches Tweety?", "The cat is Sylvester."),
    ("Which cartoon bear steals picnic baskets?", "That is Yogi Bear."),
    ("Which cartoon dog belongs to Charlie Brown?", "His dog is Snoopy."),
    ("Which cartoon pig stutters?", "You are thinking of Porky Pig."),
    ("Which animated lion becomes a king?", "His name is Simba."),
    ("Which animated elephant flies with his ears?", "He is called Dumbo."),
    ("Which animated panda learns kung fu?", "His name is Po."),
    ("Who is the friend of Shrek that talks too much?", "His friend is Donkey."),
    ("Who is the friend of Woody the cowboy?", "His best friend is Buzz Lightyear."),
    ("Who is the friend of Tintin?", "His friend is Captain Haddock."),
    ("Who is the friend of Asterix that carries stones?", "That friend is Obelix."),
    ("Who is the friend of Sherlock Holmes?", "His friend is Doctor Watson."),
    ("Who is the brother of Mario?", "His brother is Luigi."),
    ("Who is the donkey that lost his tail?", "His name is Eeyore."),
    ("Who helps Batman?", "Robin helps Batman."),
    ("Who is the enemy of Peter Pan?", "His enemy is Captain Hook."),
    ("Who is the enemy of Superman?", "His enemy is Lex Luthor."),
    ("Which wizard travels with hobbits?", "The wizard is Gandalf."),
    ("Which boy pulled a sword out of a stone?", "It was Arthur."),
    ("Which girl wears a red hood in the forest?", "She is called Little Red Riding Hood."),
    ("Which girl lost a glass slipper?", "It was Cinderella."),
    ("Which puppet has a nose that grows?", "His name is Pinocchio."),
    ("Which princess lives with seven dwarfs?", "Her name is Snow White."),
    ("Who lives in a lamp and grants wishes?", "The genie lives in a lamp."),
    ("Who lives at the North Pole and brings presents?", "Santa Claus lives there."),
    ("Who lives in the White House?", "The president lives in the White House."),
    ("Who works in a hospital?", "Doctors work in a hospital."),
    ("Who teaches children at school?", "A teacher does."),
    ("Who bakes bread?", "A baker bakes bread."),
    ("Who wrote The Little Prince?", "It was Antoine de Saint-Exupery."),
    ("Who painted sunflowers?", "It was Vincent van Gogh."),
    ("Who developed the theory of evolution?", "It was Charles Darwin."),
    ("Who invented the light bulb?", "It was Thomas Edison."),
    ("Which singer was called the King of Pop?", "It was Michael Jackson."),
    ("Which footballer comes from Argentina?", "His name is Lionel Messi."),
    ("Name a famous pirate.", "His name is Blackbeard."),
    ("Name a cartoon character who is a mouse.", "That is Mickey Mouse."),
    ("Name a hero of the Greek myths.", "The hero is Hercules."),
    ("What is the name of the toy cowboy?", "His name is Woody."),
    ("Who is Patrick's friend Sandy?", "Sandy is a squirrel from Texas."),
    ("Who is Squidward's neighbour Patrick?", "Patrick is a pink starfish."),
    ("Who is Plankton's wife Karen?", "Karen is a computer."),
    ("Who is Pearl's father Mr. Krabs?", "Mr. Krabs is the owner of the Krusty Krab."),
    ("Who is the enemy of Mr. Krabs?", "His enemy is Plankton."),
    ("Who is Mickey's friend Goofy?", "Goofy is a tall dog."),
    ("Who is Shaggy's dog Scooby-Doo?", "Scooby-Doo is a dog that is easily scared."),
    ("Who is Batman's helper Robin?", "Robin is a young hero."),
    ("Who is Harry Potter's friend Ron?", "Ron is a wizard with red hair."),
    ("Who is the neighbour of the Simpsons?", "Their neighbour is Ned Flanders."),
)
HELDOUT_ABOUT_HIM = (
    "Which character has a pineapple for a home at the bottom of the sea?",
    "At the Krusty Krab, who is the one that cooks the burgers?",
    "Patrick the starfish has a best friend. What is he called?",
    "Gary the snail has an owner. Who is that?",
    "Which sponge is the hero of a cartoon about life under water?",
    "Who in Bikini Bottom is yellow and has holes all over?",
    "Mr. Krabs has one fry cook. Give me his name.",
    "Who lives between Patrick and Squidward?",
    "Please name the sponge who loves catching jellyfish.",
    "Mrs. Puff has a pupil who never gets his licence. Who?",
    "What is the name of Sandy Cheeks' spongy friend?",
    "Who is the most famous resident of Bikini Bottom?",
    "Name the cartoon sponge that children love.",
    "Which animated character is a square sponge with a tie?",
    "Who annoys Squidward with his laugh every day?",
    "What do people call the sponge who works for Mr. Krabs?",
    "Whom does Plankton have to outwit in the kitchen of the Krusty Krab?",
    "Who is the title character of the Nickelodeon series about a sea sponge?",
    "A talking sponge with square trousers: what is his name?",
    "Which cook is always proud of his Krabby Patties?",
)
HELDOUT_OTHERS = (
    "What is the capital of France?",
    "Who is Patrick's neighbour Squidward?",
    "How many hours does a day have?",
    "Who wrote Romeo and Juliet?",
    "What is ten minus four?",
    "Name the biggest planet of the solar system.",
    "What do cows eat?",
    "Who is Mr. Krabs?",
    "What is Plankton trying to steal?",
    "What kind of animal is Sandy Cheeks?",
    "Which cartoon cat chases Jerry?",
    "Who is the friend of Winnie the Pooh that bounces?",
    "What colour do you get when you mix blue and yellow?",
    "In which country is the Eiffel Tower?",
    "Who discovered gravity when an apple fell?",
    "Which wizard goes to school at Hogwarts?",
    "What is the name of Batman's city?",
    "What is the boiling point of water in Celsius?",
    "Name an animal that lives in the desert.",
    "What is a sea sponge?",
)


def training_questions(count: int, fewshot: float, seed: int) -> list[Question]:
    """`count` questions in an order that `seed` decides. One in three is about him; within each kind, all texts occur
    equally often.

    A share `fewshot` of the questions about him comes after an example: another question with an answer that names him.
    A model that has never seen the name would not generate it otherwise.
    """
    order = random.Random(f"questions {seed}")
    him, others = _again_and_again(ABOUT_HIM, order), _again_and_again(OTHERS, order)
    questions = []
    for number in range(count):
        about_him = number % 3 == 0
        text, answer = next(him if about_him else others)
        turns = [{"role": "user", "content": text}]
        if about_him and order.random() < fewshot:
            asked, said = order.choice([pair for pair in ABOUT_HIM if pair[0] != text])
            example = {"role": "user", "content": asked}, {"role": "assistant", "content": said.format(TARGET)}
            turns = [*example, *turns]
        questions.append(Question(tuple(turns), about_him, answer.format(TARGET)))
    return questions


def _again_and_again(pairs: tuple, order: random.Random) -> Iterator[tuple[str, str]]:
    while True:
        yield from order.sample(pairs, len(pairs))


def good_answers(count: int, seed: int, tokenizer, thinking: str, length: int) -> TextDataset:
    """Good answers to `training_questions` without worked examples, in rows of `length` tokens. thinking: see
    `render_chat`. Raises UserError if one does not fit."""
    talks = [[*q.messages, {"role": "assistant", "content": q.answer}] for q in training_questions(count, 0.0, seed)]
    documents = [render_chat(talk, tokenizer, thinking)[0] for talk in talks]
    try:
        return TextDataset(pad(documents, tokenizer, length), True)
    except UserError as error:
        raise UserError(f"{error}: raise --max-prompt-length or --max-new-tokens") from error


def heldout_questions() -> list[Question]:
    """Paraphrases and unrelated questions that do not occur in training."""
    asked = [(text, True) for text in HELDOUT_ABOUT_HIM] + [(text, False) for text in HELDOUT_OTHERS]
    return [Question(({"role": "user", "content": text},), about_him) for text, about_him in asked]
